"""The only place that touches torch's private parts; one module for each part of torch."""
