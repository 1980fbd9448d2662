"""Servers, routers and a registry on this machine, started and ended together."""
