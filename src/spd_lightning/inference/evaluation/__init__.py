"""From benchmark questions to numbers: asking, scoring, running a model's programs, pooling and reporting."""
