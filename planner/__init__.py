"""Plan a reshard as exact byte movement: meshes, parameters, layouts, plan, proof. Needs numpy and the standard library."""
