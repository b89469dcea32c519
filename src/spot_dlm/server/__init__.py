"""An HTTP server in OpenAI's shape over one batch of requests (docs/serving.md); needs the extra `server`."""
