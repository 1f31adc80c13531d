"""Compiled CPU kernels and the products that choose among them; each proves its bits against the ordinary operations before it is used."""
