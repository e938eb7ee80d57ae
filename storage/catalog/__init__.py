"""The catalog of a home: runs, requests, promotions, differences between runs, SQL."""
