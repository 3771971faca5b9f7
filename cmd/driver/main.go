// Command driver is the Ashlar CSI driver.
package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/cli"
)

// version is set by the build.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := newRoot().ExecuteContext(ctx)
	stop()
	os.Exit(cli.Exit("driver", err))
}

// newRoot returns the command line. Without a command it serves, so its flags are those of serve. Commands return their errors: main prints an error in one
// line, and ends with the status of cli.Exit.
func newRoot() *cobra.Command {
	cobra.EnableCommandSorting = false
	root := serveCommand()
	root.Use = "driver"
	root.Short = "A CSI driver that cuts block volumes out of the disks a machine already has"
	root.Long = `driver is the CSI driver Ashlar, which cuts block volumes out of the disks a machine already has.
Without a command it serves (driver serve), with the flags below.`
	root.Args = knownCommand
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetFlagErrorFunc(flagError)
	root.SetUsageFunc(usage)
	root.SetVersionTemplate("{{.Version}}\n")
	root.AddCommand(serveCommand(), demoCommand(), doctorCommand())
	root.AddCommand(showCommands()...)
	root.AddCommand(manifestsCommand(), versionCommand(), completionCommand())
	return root
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version)
			return err
		},
	}
}

func completionCommand() *cobra.Command {
	shells := map[string]func(*cobra.Command, io.Writer) error{
		"bash": func(root *cobra.Command, to io.Writer) error { return root.GenBashCompletionV2(to, true) },
		"fish": func(root *cobra.Command, to io.Writer) error { return root.GenFishCompletion(to, true) },
		"zsh":  (*cobra.Command).GenZshCompletion,
	}
	names := slices.Sorted(maps.Keys(shells))
	return &cobra.Command{
		Use:   "completion bash|fish|zsh",
		Short: "Print the completion script for a shell",
		Long: `driver completion prints a script that completes commands and flags of the driver in a shell. For this session:

  bash:  source <(driver completion bash)
  fish:  driver completion fish | source
  zsh:   source <(driver completion zsh)`,
		DisableFlagsInUseLine: true,
		ValidArgs:             names,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || shells[args[0]] == nil {
				return fmt.Errorf("completion for %q: give one of %s", args, strings.Join(names, ", "))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return shells[args[0]](cmd.Root(), cmd.OutOrStdout())
		},
	}
}
