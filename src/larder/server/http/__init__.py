"""HTTP front end of the server: OpenAI-compatible endpoints, authentication, metrics."""
