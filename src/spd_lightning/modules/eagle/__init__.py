"""EAGLE-3 (design §7): its drafter, the training-time test, and the published file format."""
