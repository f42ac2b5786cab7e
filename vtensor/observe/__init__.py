"""What a cache holds, for people: one module a way of showing it."""
