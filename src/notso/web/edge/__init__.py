"""Around every request: access, limits, security headers, assets, the form of errors."""
