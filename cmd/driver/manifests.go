package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
)

func manifestsCommand() *cobra.Command {
	var o options
	var l lost.Options
	cmd := &cobra.Command{
		Use:   "manifests",
		Short: "Print the PersistentVolumes and snapshot contents that a cluster has lost",
		Long: `driver manifests prints the Kubernetes objects that a cluster lacks for the volumes and snapshots of the driver:

- PersistentVolumes, and the PersistentVolumeClaims that the volumes were made for;
- VolumeSnapshotContents and VolumeGroupSnapshotContents, with a VolumeSnapshot or VolumeGroupSnapshot
  for each.

All of them have the policy Retain. The command changes nothing: look at what it prints, then give that
to "kubectl apply -f -".`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return manifests(cmd.Context(), o, l, cmd.OutOrStdout()) },
	}
	addFlags(cmd, "The cluster", func(flags *pflag.FlagSet) {
		flags.StringVar(&o.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "file that says how to reach the Kubernetes API; without it, as a pod does")
		flags.StringVar(&l.Driver, "driver-name", cluster.DefaultDriver, "name of the CSI driver")
	})
	addFlags(cmd, "What nothing else tells of the lost objects", func(flags *pflag.FlagSet) {
		flags.StringVar(&l.Class, "storage-class", "ashlar", "StorageClass of the volumes")
		flags.StringVar(&l.AccessMode, "access-mode", string(corev1.ReadWriteOnce), "access mode of the volumes")
		flags.StringVar(&l.Namespace, "namespace", "default", "namespace of VolumeSnapshots of volumes that nobody knows the claim of")
	})
	return cmd
}

// manifests prints the objects of Kubernetes that are missing for volumes and snapshots, and doubts about them as comments (package lost).
func manifests(ctx context.Context, o options, l lost.Options, to io.Writer) error {
	o.mode, o.driverName = "manifests", l.Driver
	config, err := o.kubernetes("manifests")
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), storagev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	objects, doubts, err := lost.Find(ctx, c, l)
	if err != nil {
		return err
	}
	for _, one := range doubts {
		if _, err := fmt.Fprintf(to, "# %s.\n", cli.Line(one)); err != nil {
			return err
		}
	}
	for _, one := range objects {
		text, err := yaml.Marshal(one)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(to, "---\n%s", text); err != nil {
			return err
		}
	}
	return nil
}
