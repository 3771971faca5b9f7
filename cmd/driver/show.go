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

// running is the driver that serves on this machine: its pools are its own, so it is asked for what they have.
type running struct{ path string }

func (r running) Overview(ctx context.Context) (*overview.Overview, error) {
	return socket.Ask(ctx, r.path)
}

// Details of a volume: the overview of a machine has them all, and nobody writes down its history but the log.
func (running) Details(context.Context, *overview.Volume) ([]cli.Event, []string, error) {
	return nil, nil, nil
}

// showCommands are those that show what the driver of this machine has; in a cluster "kubectl ashlar" has the same.
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
