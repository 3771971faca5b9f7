// Package kube connects to Kubernetes, and knows nothing of volumes: a connection whose reads see its own writes, watches of single objects, lists in
// pages, patches that fail with a conflict, and errors of the API server as errors of pkg/errdefs.
package kube
