"""Where the roles of a pipeline run: in one process, or over ranks."""
