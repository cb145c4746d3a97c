"""`python -m tokenfleet.producer.gateway`: the same as `tokenfleet-gateway`."""

from tokenfleet.producer.gateway.command import main

if __name__ == "__main__":
    main()
