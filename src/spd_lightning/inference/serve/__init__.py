"""An HTTP endpoint that speaks OpenAI's protocol, for one decoder and one answer at a time."""
