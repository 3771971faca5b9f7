// Command kubectl-ashlar is a plugin of kubectl: "kubectl ashlar".
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/cli"
)

// version is set by the build.
var version = "dev"

func main() {
	klog.LogToStderr(true) // the log of client-go
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop) // from now on a signal ends the process
	err := newRoot().ExecuteContext(ctx)
	stop()
	if errors.Is(err, context.Canceled) {
		err = errors.New("interrupted")
	}
	os.Exit(cli.Exit("kubectl ashlar", err))
}

// newRoot returns the command line. All requests are made with the rights of the user's kubeconfig.
func newRoot() *cobra.Command {
	cobra.EnableCommandSorting = false
	flags := genericclioptions.NewConfigFlags(true)
	*flags.Timeout = requestTime
	root := &cobra.Command{
		Use:   "kubectl-ashlar",
		Short: "See what Ashlar's volumes and pools are, and what is wrong",
		Long: `kubectl ashlar shows the volumes and pools of Ashlar in a cluster, and what is wrong with them. Begin with
"kubectl ashlar status".

It asks the API server with your own rights, and says what it leaves out for want of them.`,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl ashlar"},
		Version:       version,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.SetVersionTemplate("{{.Version}}\n")
	flags.AddFlags(root.PersistentFlags())
	root.AddCommand(cli.Commands(func() (cli.Source, error) { return connect(flags) }, true)...)
	root.AddCommand(moveCommand(flags), replicasCommand(flags), evacuateCommand(flags), scrubCommand(flags), doctorCommand(flags), adoptCommand(flags))
	return root
}
