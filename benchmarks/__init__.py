"""Scripts that measure this project against others: see README.md."""
