package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/pkg/cluster/view"
)

func doctorCommand(flags *genericclioptions.ConfigFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "doctor [NODE]",
		Short: "Check whether a node, or each, has what the driver needs",
		Long: `kubectl ashlar doctor runs "driver doctor" in the driver's pod on a node, or on each node, with the pools of
that pod. It prints one line for each check: ok, warning or failure, and what to do. It changes
nothing. It needs the right to run programs in the driver's pods (pods/exec). It ends with status 1 if
there is a failure.`,
		Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
			c, err := connect(flags)
			if err != nil || len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			agents, _ := c.agents(cmd.Context()) // on an error there are no completions
			var names []string
			for _, pod := range agents {
				if strings.HasPrefix(pod.Spec.NodeName, begun) {
					names = append(names, pod.Spec.NodeName)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := connect(flags)
			if err != nil {
				return err
			}
			if len(args) == 1 {
				pod, err := c.agent(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				return c.examine(cmd, pod)
			}
			agents, err := c.agents(cmd.Context())
			if err != nil {
				return err
			}
			if len(agents) == 0 {
				return errors.New("no pod of the driver runs in this cluster; see kubectl get daemonsets -A -l app.kubernetes.io/name=ashlar")
			}
			slices.SortFunc(agents, func(a, b corev1.Pod) int { return strings.Compare(a.Spec.NodeName, b.Spec.NodeName) })
			var failures []error
			for i := range agents {
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%sNode %s\n", strings.Repeat("\n", min(i, 1)), agents[i].Spec.NodeName); err != nil {
					return err
				}
				failures = append(failures, c.examine(cmd, &agents[i]))
			}
			return errors.Join(failures...)
		},
	}
}

// examine runs "driver doctor" in the pod of an agent, with the pools of that pod.
func (c *cluster) examine(cmd *cobra.Command, pod *corev1.Pod) error {
	program := append([]string{"/driver", "doctor"}, poolsOf(pod)...)
	out, complaints := cli.Plain(cmd.OutOrStdout()), cli.Plain(cmd.ErrOrStderr())
	err := c.run(cmd.Context(), pod, out, complaints, program...)
	if cmd.Context().Err() != nil {
		return cmd.Context().Err()
	}
	if err = errors.Join(err, out.Close(), complaints.Close()); err != nil {
		return fmt.Errorf("driver doctor on node %s (pod %s/%s): %w", pod.Spec.NodeName, pod.Namespace, pod.Name, err)
	}
	return nil
}

// poolsOf returns the --pool flags of the driver in a pod.
func poolsOf(pod *corev1.Pod) []string {
	var flags []string
	for _, container := range pod.Spec.Containers {
		if container.Name != view.AgentContainer {
			continue
		}
		for i, arg := range container.Args {
			if strings.HasPrefix(arg, "--pool=") {
				flags = append(flags, arg)
			} else if arg == "--pool" && i+1 < len(container.Args) {
				flags = append(flags, arg, container.Args[i+1])
			}
		}
	}
	return flags
}
