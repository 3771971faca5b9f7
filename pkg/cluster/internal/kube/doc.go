// Package kube is what the parts of a cluster need of Kubernetes, whatever their objects mean: a connection whose reads
// have seen its own writes, watches of single objects, lists in pages, patches that fail with a conflict, and errors of
// the API server as those of pkg/errdefs.
package kube
