// Package cluster is the contract between the two halves of the driver in a Kubernetes cluster, which share nothing but the objects of pkg/api. In the
// controller, package store writes their specs. On each node, package agent carries these out on the volumes of the node, and writes their statuses.
// Package gc, in the controller, deletes what nobody needs any more. Both sides watch the objects, rather than poll them.
//
// This package says what those objects mean: their names and IDs, how they are turned into the volumes of pkg/volume and back, how a deletion is allowed
// (spec.delete), how errors are written into them, which driver they belong to, and the heartbeat of agents.
//
// docs/cluster.md says which requests each call costs, and who deletes what.
package cluster
