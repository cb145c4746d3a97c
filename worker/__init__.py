"""The process between Redis and the engine: claims jobs, publishes tokens, and what people see.

Nothing is exported: a worker is started by `tokenfleet worker` (commands/cli.py), which runs a
WorkerService (service.py).
"""
