package main

import (
	"context"
	"flag"

	"github.com/ashlar-csi/ashlar/internal/doctor"
)

const doctorUsage = `driver doctor checks whether this machine has what the driver needs, one line for
each thing: ok, warning (something will not work, or not as well) or failure (the driver
does not work), and what to do. It changes nothing. It ends with status 1 if there is a
failure.

`

// doctorCommand is "driver doctor".
func doctorCommand(ctx context.Context, args []string) error {
	var given poolFlags
	flags := flag.NewFlagSet("driver doctor", flag.ContinueOnError)
	flags.Var(&given, "pool", "pool to check, as NAME=URL, as for serve; may be given more than once (default "+defaultPool+")")
	if done, err := parseFlags(flags, doctorUsage, args); done || err != nil {
		return err
	}
	if len(given) == 0 {
		if err := given.Set(defaultPool); err != nil {
			return err
		}
	}
	var all []doctor.Pool
	for _, p := range given {
		all = append(all, doctor.Pool{Name: p.name, Location: p.location})
	}
	return doctor.Run(ctx, all)
}
