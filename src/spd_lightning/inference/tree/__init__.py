"""Draft trees (design §8): several candidates a level instead of one, in the same pipeline."""
