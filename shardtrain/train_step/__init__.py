"""The compiled training step: state, gradients, update; on one mesh, across islands, in stages."""
