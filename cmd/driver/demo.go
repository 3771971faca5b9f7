package main

import (
	"context"
	"flag"
	"os"

	"github.com/ashlar-csi/ashlar/internal/demo"
)

const demoUsage = `driver demo starts a driver with a pool in a new folder, takes volumes through their
whole lives over CSI, and prints each step with its time and with what the kernel then
shows of the volume. It ends with status 0 only if every step did what it should and
nothing of it is left on the machine. It needs root.

`

// demoCommand is "driver demo".
func demoCommand(ctx context.Context, args []string) error {
	var parent string
	flags := flag.NewFlagSet("driver demo", flag.ContinueOnError)
	flags.StringVar(&parent, "dir", os.TempDir(), "folder in which the demo makes a folder for itself, and removes it again")
	if done, err := parseFlags(flags, demoUsage, args); done || err != nil {
		return err
	}
	return demo.Run(ctx, parent, version)
}
