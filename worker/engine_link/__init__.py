"""The engine process and the worker's ends of its socket."""
