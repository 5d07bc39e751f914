"""Request handling and response formats shared by all APIs."""
