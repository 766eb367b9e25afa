"""Layouts, the mesh, and the PartitionSpecs that follow from both."""
