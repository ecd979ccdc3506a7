"""The model of a store as a machine: revisioned keys, transactions, history, leases."""
