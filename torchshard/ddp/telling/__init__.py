"""What a wrapper says of itself: to people, to torch's loggers, and in errors."""
