package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/demo"
)

func demoCommand() *cobra.Command {
	var parent string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Take volumes through their whole lives, and show it (root)",
		Long: `driver demo starts a driver with a pool in a new directory, and takes volumes through their whole lives over
CSI. It prints each step, how long it took, and what the kernel then shows of the volume. It ends with
status 0 only if every step did what it should, and nothing is left on the machine. It needs root.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return demo.Run(cmd.Context(), parent, version) },
	}
	cmd.Flags().StringVar(&parent, "dir", os.TempDir(), "directory in which the demo makes one for itself, and removes it again")
	return cmd
}
