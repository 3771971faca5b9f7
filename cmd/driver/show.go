package main

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/overview/socket"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
)

// running is the cli.Source of a machine: it asks the driver that serves there.
type running struct{ path string }

func (r running) Overview(ctx context.Context) (*overview.Overview, error) {
	return socket.Ask(ctx, r.path)
}

// Details returns none: the overview of a machine has all of a volume, and its history is in the log alone.
func (running) Details(context.Context, *overview.Volume) ([]cli.Event, []string, error) {
	return nil, nil, nil
}

// showCommands returns the commands that show what the driver of this machine has. In a cluster "kubectl ashlar" has the same ones.
func showCommands() []*cobra.Command {
	var endpoint string
	all := cli.Commands(func() (cli.Source, error) {
		path, err := rpc.ParseEndpoint(endpoint)
		return running{path}, err
	}, false)
	for _, cmd := range all {
		addFlags(cmd, "The driver", func(flags *pflag.FlagSet) {
			flags.StringVar(&endpoint, "endpoint", defaultEndpoint, "unix socket that the driver of this machine serves on")
		})
	}
	return all
}
