// Package cluster is the contract between the two halves of the driver in a Kubernetes cluster. The objects of pkg/api
// are all that they share: for the controller, package store writes down what is to be; on each node, package agent
// carries it out on the volumes of that node, and writes down what is. Package gc collects, in the controller, what
// nobody knows of any more. Whoever waits, watches; nobody polls.
//
// Here is what those objects mean: their names and IDs, how they become the volumes of pkg/volume and back, the words
// that allow their bytes to be made or deleted, the words for errors, which driver they belong to, and the heartbeat of
// agents.
//
// docs/cluster.md says which requests each call costs, and who deletes what.
package cluster
