"""What an engine's answer must pass, and the channels that come with it."""
