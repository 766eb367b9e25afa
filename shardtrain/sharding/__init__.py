"""How arrays are placed: mesh axes, layouts, and the specs that follow from them."""
