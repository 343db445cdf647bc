"""Settings of a run as frozen pydantic models; reading and writing TOML."""
