"""Server endpoints: models, adapters, tokenization, status and the OpenAPI document."""
