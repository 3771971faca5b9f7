// Command driver is the Ashlar CSI driver.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

// version is set by the build.
var version = "dev"

const usage = `Ashlar cuts block volumes out of the disks a machine already has (a CSI driver).

  driver [serve] [flags]   serve CSI on a unix socket
  driver demo [flags]      take volumes through their whole lives, and show it
  driver doctor [flags]    check whether this machine has what the driver needs
  driver manifests [flags] print the PersistentVolumes and snapshot contents that a cluster has lost
  driver version           print the version

Use "driver COMMAND --help" for the flags of a command.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "driver:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	command := "serve"
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		command, args = args[0], args[1:]
	}
	switch command {
	case "serve":
		return serve(ctx, args)
	case "demo":
		return demoCommand(ctx, args)
	case "doctor":
		return doctorCommand(ctx, args)
	case "manifests":
		return manifests(ctx, args)
	case "version":
		fmt.Println(version)
		return nil
	case "help":
		fmt.Print(usage)
		return nil
	}
	return fmt.Errorf("unknown command %q; \"driver help\" lists them", command)
}

// parseFlags parses the flags of a command, which takes no other arguments. done: they
// asked for help, which was printed after the introduction.
func parseFlags(flags *flag.FlagSet, introduction string, args []string) (done bool, err error) {
	var help strings.Builder
	flags.SetOutput(&help)
	err = flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Print(introduction, help.String())
		return true, nil
	}
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	return false, err // what flag printed too would bury it
}
