"""Tests of evaluation: asking, scoring, pooling and reporting."""
