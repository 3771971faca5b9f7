package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// groupKey is the annotation of a flag with the title of its group in the help.
const groupKey = "group"

// addFlags adds the flags that add defines to a command. Its help shows them below a title, in the order of their definition.
func addFlags(cmd *cobra.Command, title string, add func(*pflag.FlagSet)) {
	group := pflag.NewFlagSet(title, pflag.ContinueOnError)
	group.SortFlags = false
	add(group)
	group.VisitAll(func(f *pflag.Flag) { f.Annotations = map[string][]string{groupKey: {title}} })
	cmd.Flags().SortFlags = false
	cmd.Flags().AddFlagSet(group)
}

// usage prints how a command is called, its commands, and its flags in groups. Help prints that below the command's description.
func usage(cmd *cobra.Command) error {
	var text strings.Builder
	text.WriteString("Usage:\n")
	if !cmd.HasParent() {
		text.WriteString("  driver [serve] [flags]\n  driver COMMAND [flags]\n")
	} else {
		fmt.Fprintf(&text, "  %s\n", cmd.UseLine())
	}
	if cmd.HasAvailableSubCommands() {
		text.WriteString("\nCommands:\n")
		for _, one := range cmd.Commands() {
			if one.IsAvailableCommand() || one.Name() == "help" {
				fmt.Fprintf(&text, "  %-*s %s\n", one.NamePadding(), one.Name(), one.Short)
			}
		}
	}
	for _, group := range flagGroups(cmd) {
		fmt.Fprintf(&text, "\n%s:\n%s", group.title, group.flags.FlagUsages())
	}
	if cmd.HasAvailableSubCommands() {
		fmt.Fprintf(&text, "\nUse \"%s COMMAND --help\" for more about a command.\n", cmd.CommandPath())
	}
	_, err := fmt.Fprint(cmd.OutOrStderr(), text.String())
	return err
}

type flagGroup struct {
	title string
	flags *pflag.FlagSet
}

// flagGroups returns the flags of a command in groups by title, those without one last.
func flagGroups(cmd *cobra.Command) []flagGroup {
	var groups []flagGroup
	rest := flagGroup{"Flags", pflag.NewFlagSet("", pflag.ContinueOnError)}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		title := f.Annotations[groupKey]
		if title == nil {
			rest.flags.AddFlag(f)
			return
		}
		if len(groups) == 0 || groups[len(groups)-1].title != title[0] {
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			flags.SortFlags = false
			groups = append(groups, flagGroup{title[0], flags})
		}
		groups[len(groups)-1].flags.AddFlag(f)
	})
	if len(groups) > 0 {
		rest.title = "Other flags"
	}
	if rest.flags.HasFlags() {
		groups = append(groups, rest)
	}
	return groups
}

// flagError says what is wrong with a flag, and where to look. pflag reads a long flag with one dash as several short ones, and -v takes what follows as its
// value, so its own errors would not tell of the missing dash.
func flagError(cmd *cobra.Command, err error) error {
	var written string // what followed a single dash
	var unknown *pflag.NotExistError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		written = unknown.GetSpecifiedShortnames()
	case errors.As(err, &invalid) && invalid.GetFlag().Shorthand != "":
		written = invalid.GetFlag().Shorthand + invalid.GetValue()
	}
	name, _, _ := strings.Cut(written, "=")
	if len(name) > 1 && cmd.Flags().Lookup(name) != nil {
		return fmt.Errorf("-%s: write --%s, with two dashes", name, name)
	}
	return fmt.Errorf("%w; \"%s --help\" lists the flags", err, cmd.CommandPath())
}

// noArguments is cobra.Command.Args of commands that take flags only.
func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q", args[0])
	}
	return nil
}

// knownCommand is cobra.Command.Args of the program itself: an argument that is left was meant as a command.
func knownCommand(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unknown command %q; \"driver --help\" lists them", args[0])
	}
	return nil
}
