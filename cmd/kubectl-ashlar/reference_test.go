package main

import (
	"testing"

	"github.com/spf13/pflag"

	"github.com/ashlar-csi/ashlar/tests/docs/reference"
)

// TestReference: docs/reference/kubectl-ashlar.md has what the command line says of itself.
func TestReference(t *testing.T) {
	root := newRoot()
	reference.Check(t, "../..", "kubectl-ashlar.md", "# kubectl ashlar\n\n"+root.Long+"\n\nAll take kubectl's own flags beside theirs (`--context`, `--kubeconfig` and so on).\n\n"+
		reference.Commands(root, func(*pflag.Flag) string { return "Flags" }))
}
