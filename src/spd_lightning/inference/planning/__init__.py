"""What a pipeline will do before there is one: its pieces, its cycle, its memory, and the best way to cut it."""
