"""Where modules run: targets, products, and the devices of this machine."""
