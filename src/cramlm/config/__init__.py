"""Settings as frozen pydantic models; TOML in and out."""
