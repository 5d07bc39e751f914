"""Request boundary: access control, limits, security headers, static assets and error formats."""
