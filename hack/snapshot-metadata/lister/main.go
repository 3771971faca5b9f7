// Command lister asks for the blocks of a VolumeSnapshot as backup tools do, through the client of external-snapshot-metadata, and prints a
// line for each range: its offset and its length, in bytes. (That project's snapshot-metadata-lister does the same, and is a
// module of its own that the proxies do not have.)
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/iterator"
	"k8s.io/client-go/tools/clientcmd"
)

type lines struct{}

func (lines) SnapshotMetadataIteratorRecord(_ int, metadata iterator.IteratorMetadata) error {
	for _, r := range metadata.BlockMetadata {
		if _, err := fmt.Println(r.ByteOffset, r.SizeBytes); err != nil {
			return err
		}
	}
	return nil
}

func (lines) SnapshotMetadataIteratorDone(int) error { return nil }

func main() {
	args := iterator.Args{Emitter: lines{}, TokenExpirySecs: 600}
	kubeconfig := flag.String("kubeconfig", os.Getenv("KUBECONFIG"), "")
	flag.StringVar(&args.Namespace, "n", "default", "namespace of the VolumeSnapshots")
	flag.StringVar(&args.SnapshotName, "s", "", "VolumeSnapshot")
	flag.StringVar(&args.PrevSnapshotName, "p", "", "an earlier one: what changed since")
	flag.StringVar(&args.SANamespace, "service-account-namespace", "", "")
	flag.StringVar(&args.SAName, "service-account", "", "who calls")
	flag.Int64Var(&args.StartingOffset, "starting-offset", 0, "")
	most := flag.Int("max-results", 0, "")
	flag.Parse()
	args.MaxResults = int32(*most)
	if err := run(*kubeconfig, args); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(kubeconfig string, args iterator.Args) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	if args.Clients, err = iterator.BuildClients(config); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	return iterator.GetSnapshotMetadata(ctx, args)
}
