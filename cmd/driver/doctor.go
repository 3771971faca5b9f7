package main

import (
	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/doctor"
)

func doctorCommand() *cobra.Command {
	var given poolFlags
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check whether this machine has what the driver needs",
		Long: `driver doctor checks whether this machine has what the driver needs. It prints one line for each check, and
what to do: ok, warning (something will not work, or not as well) or failure (the driver does not
work). It changes nothing. It ends with status 1 if there is a failure, or if it could not print
everything.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := given.setDefault(); err != nil {
				return err
			}
			var all []doctor.Pool
			for _, p := range given {
				all = append(all, doctor.Pool{Name: p.name, Location: p.location})
			}
			return doctor.Run(cmd.Context(), cmd.OutOrStdout(), all)
		},
	}
	cmd.Flags().Var(&given, "pool", "pool to check, as for serve; may be given more than once (default "+defaultPool+")")
	return cmd
}
