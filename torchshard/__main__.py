"""`python -m torchshard` is the command `torchshard`."""

from torchshard.cli import main

main()
