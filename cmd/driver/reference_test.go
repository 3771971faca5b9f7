package main

import (
	"os"
	"testing"

	"github.com/spf13/pflag"

	"github.com/ashlar-csi/ashlar/tests/docs/reference"
)

// TestReference: docs/reference/driver.md has what the command line says of itself.
func TestReference(t *testing.T) {
	t.Setenv("KUBECONFIG", "") // both are defaults of flags
	t.Setenv("TMPDIR", "/tmp")
	root := newRoot()
	host, _ := os.Hostname()
	for _, cmd := range root.Commands() {
		if id := cmd.Flags().Lookup("node-id"); id != nil && id.DefValue == host {
			id.DefValue = "the host name"
		}
	}
	reference.Check(t, "../..", "driver.md", "# driver\n\n"+root.Long+"\n\n`driver --help` and `driver COMMAND --help` print the same.\n\n"+
		reference.Commands(root, func(f *pflag.Flag) string {
			if title := f.Annotations[groupKey]; title != nil {
				return title[0]
			}
			return "Flags"
		}))
}
