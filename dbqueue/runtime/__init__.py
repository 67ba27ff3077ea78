"""What lives: the worker's loop, its slots, waking up and shutting down. Runtimes open transactions and call verbs; events are
emitted after the commit that made them true."""
