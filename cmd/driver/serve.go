package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/internal/overview/socket"
	"github.com/ashlar-csi/ashlar/internal/trace"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/disks"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/identity"
	"github.com/ashlar-csi/ashlar/pkg/measure"
	"github.com/ashlar-csi/ashlar/pkg/metrics"
	"github.com/ashlar-csi/ashlar/pkg/mount"
	"github.com/ashlar-csi/ashlar/pkg/node"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// options are the flags of serve.
type options struct {
	endpoint     string
	metrics      string // address to serve metrics on; empty: none are served
	perVolume    bool   // with metrics of each volume
	traces       string // address to send traces to; empty: none are sent
	mode         string
	nodeID       string
	driverName   string
	pools        poolFlags
	maxVolumes   int64
	claims       bool
	kubeconfig   string
	goneGrace    time.Duration
	abandonGrace time.Duration
	startupTaint bool
	labels       labelFlags
	// The agent's port, which the controller and other agents call.
	agentEndpoint string
	copyBandwidth string
	bandwidth     int64 // bytes per second, from copyBandwidth; 0: no limit
	blocks        bool  // the controller serves SnapshotMetadata, and asks the agents
	// Where volumes of this node are exported to other nodes, and in which network.
	remoteAddress, remoteNetwork string
	remoteTLS                    bool
	scrubEvery                   time.Duration
	scrubBandwidth               string
	scrubRate                    int64 // bytes per second of each leg, from scrubBandwidth; 0: no limit
	page                         string
	logFormat                    string
	verbosity                    int // that of klog, -v

	ephemeralPools, ephemeralSize string
	ephemeral                     node.Ephemeral // from these two
}

// labelFlags are the values of --topology-label KEY.
type labelFlags []string

func (l *labelFlags) String() string { return strings.Join(*l, " ") }

// Type is what the help shows as the value.
func (l *labelFlags) Type() string { return "KEY" }

func (l *labelFlags) Set(key string) error {
	if problems := validation.IsQualifiedName(key); len(problems) > 0 {
		return fmt.Errorf("%q is not the key of a label: %s", key, problems[0])
	}
	if key == csimap.TopologyKey || key == csimap.NetworkKey || slices.Contains(*l, key) {
		return fmt.Errorf("%s is given already", key)
	}
	*l = append(*l, key)
	return nil
}

const (
	defaultPool     = "default=file:///var/lib/ashlar"
	defaultEndpoint = "unix:///csi/csi.sock"
)

// poolFlags are the values of --pool NAME=URL.
type poolFlags []poolFlag

type poolFlag struct {
	name, url string
	location  pools.Location
}

func (p *poolFlags) String() string {
	var all []string
	for _, one := range *p {
		all = append(all, one.name+"="+one.url)
	}
	return strings.Join(all, " ")
}

// Type is what the help shows as the value.
func (p *poolFlags) Type() string { return "NAME=URL" }

func (p *poolFlags) Set(text string) error {
	name, url, ok := strings.Cut(text, "=")
	if !ok {
		return errors.New("write it as NAME=URL, for example " + defaultPool)
	}
	if !blockdev.ValidPoolName(name) {
		return fmt.Errorf("pool name %q: use 1 to 24 of a-z, 0-9 and -, with no - at either end", name)
	}
	for _, one := range *p {
		if one.name == name {
			return fmt.Errorf("pool %s is given twice", name)
		}
	}
	location, err := pools.Parse(url)
	if err != nil {
		return err
	}
	*p = append(*p, poolFlag{name, url, location})
	return nil
}

// setDefault adds the default pool if no pool was given.
func (p *poolFlags) setDefault() error {
	if len(*p) > 0 {
		return nil
	}
	return p.Set(defaultPool)
}

// driverNamePattern is the form of a driver's name (CSI specification, GetPluginInfoResponse.name).
var driverNamePattern = regexp.MustCompile(`^[a-zA-Z0-9]([-.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$`)

// nodePattern is the form of a node's name, which is the value of a topology segment (CSI specification, Topology).
var nodePattern = regexp.MustCompile(`^[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?$`)

// serveCommand returns the command "driver serve", which is also what the program does without a command.
func serveCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:     "serve",
		Short:   "Serve CSI on a unix socket; so does driver without a command",
		Long:    "driver serve serves CSI on a unix socket. SIGTERM or SIGINT ends it; calls that are under way may end first.",
		Version: version,
		Args:    noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.complete(cmd.Flags()); err != nil {
				return err
			}
			return serve(cmd.Context(), o)
		},
	}
	o.addFlags(cmd)
	for flag, values := range map[string][]cobra.Completion{"mode": modes, "logging-format": logFormats} {
		_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)) // cannot fail: both flags exist
	}
	return cmd
}

// The values of --mode and --logging-format.
var (
	modes      = []string{"all", "controller", "node"}
	logFormats = []string{"text", "json"}
)

func (o *options) addFlags(cmd *cobra.Command) {
	addFlags(cmd, "What is served", o.servingFlags)
	addFlags(cmd, "Pools and volumes of this machine", o.volumeFlags)
	addFlags(cmd, "Kubernetes", o.kubernetesFlags)
	addFlags(cmd, "Monitoring", o.monitoringFlags)
	addFlags(cmd, "Logging", o.loggingFlags)
	addFlags(cmd, "Other flags", func(flags *pflag.FlagSet) {
		flags.BoolP("help", "h", false, "print this help")
		flags.Bool("version", false, "print the version")
	})
}

func (o *options) servingFlags(flags *pflag.FlagSet) {
	host, _ := os.Hostname()
	flags.StringVar(&o.endpoint, "endpoint", defaultEndpoint, "unix socket to serve CSI on")
	flags.StringVar(&o.mode, "mode", "all", "all: every service, over the pools of this machine, without Kubernetes;\ncontroller: the Controller services of a cluster;\nnode: the Node service of a cluster, over the pools of this machine")
	flags.StringVar(&o.nodeID, "node-id", host, "name of this node; in a cluster, that of its Node object")
	flags.StringVar(&o.driverName, "driver-name", "block.csi.ashlar.dev", "name of the CSI driver")
	flags.StringVar(&o.page, "page", "", "`ADDRESS` to serve a page for browsers on, as localhost:9820: what there is and what is wrong. It has no login\n(all and controller)")
}

func (o *options) volumeFlags(flags *pflag.FlagSet) {
	flags.Var(&o.pools, "pool", "pool of volumes; may be given more than once, the first is the default one.\nfile:///DIRECTORY?overprovision=1.0&reservePercent=5 keeps volumes as files,\nlvm://GROUP and lvm://GROUP/THINPOOL as logical volumes (default "+defaultPool+")")
	flags.Int64Var(&o.maxVolumes, "max-volumes", 0, "most volumes that may be published to this node; 0 is any number")
	flags.BoolVar(&o.claims, "attach-required", true, "volumes have to be published to this node by the controller before they are staged here;\nfalse only where the CSIDriver object says attachRequired: false")
	flags.StringVar(&o.ephemeralPools, "ephemeral-pools", "", "pools in which inline ephemeral volumes are made, separated by commas; the first is their default one\n(default with --mode=all: all; with --mode=node: none, as any author of a pod may ask for them)")
	flags.StringVar(&o.ephemeralSize, "ephemeral-max-size", "1Gi", "largest size of an inline ephemeral volume: bytes, or as 500M or 1Gi")
}

func (o *options) kubernetesFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "file that says how to reach the Kubernetes API; without it, as a pod does (controller and node)")
	flags.Var(&o.labels, "topology-label", "label of the Node object that says where the node is, as topology.kubernetes.io/zone;\nmay be given more than once. A StorageClass can ask for it in allowedTopologies (node)")
	flags.DurationVar(&o.goneGrace, "gone-grace", 5*time.Minute, "how long, as 90s or 5m, a node has to be gone (its object deleted, or tainted ashlar.dev/gone)\nbefore its deleted volumes are given up (controller)")
	flags.DurationVar(&o.abandonGrace, "abandon-grace", time.Hour, "how long, as 30m or 1h, what seems to be abandoned is kept: a volume without PersistentVolumeClaim and PersistentVolume,\nfrom its creation; a claim without VolumeAttachment, from the first call that was refused because of it (controller)")
	flags.StringVar(&o.agentEndpoint, "agent-endpoint", "", "IP:PORT to serve other parts of the driver on, over TLS, as 10.0.0.7:9812. They have to reach this address, and learn it\nfrom the status of the node's pools; without it, there is no port (node)")
	flags.StringVar(&o.copyBandwidth, "copy-bandwidth", "", "bytes per second, as 200Mi, that all other nodes together may fetch from this one (copies of its snapshots and volumes,\nvolumes that move there), and that this one may copy of volumes that move while it uses them, and to replicas that are\nresynchronised; without it, there is no limit (node)")
	flags.StringVar(&o.remoteAddress, "remote-address", "", "IP address or network interface of this node, with a port if it is not 4420, as 10.0.0.7, eth1 or [fd00::7]:4420, at which\nother nodes use its volumes by NVMe over TCP (access=any of a StorageClass). The address has to be in the host's network,\nand --agent-endpoint has to be given; without it, volumes are used on their own node only (node)")
	flags.BoolVar(&o.remoteTLS, "remote-tls", false, "export volumes to other nodes over TLS only, and use none that is exported without; both nodes need Linux 6.7 and a\nrunning tlshd (node)")
	flags.StringVar(&o.remoteNetwork, "remote-network", "default", "name of the network of --remote-address: nodes with the same name here reach each other (node)")
	flags.DurationVar(&o.scrubEvery, "scrub-every", 720*time.Hour, "how often the replicas of the volumes that this node uses are compared, as 168h; 0: only on request (node)")
	flags.StringVar(&o.scrubBandwidth, "scrub-bandwidth", "16Mi", "bytes per second of each replica that may be read to compare them; 0: no limit (node)")
	flags.BoolVar(&o.blocks, "snapshot-metadata", false, "serve SnapshotMetadata (what is allocated, and what changed, in snapshots) by asking the nodes,\nwhich need --agent-endpoint (controller)")
	flags.BoolVar(&o.startupTaint, "startup-taint", false, "take the taint ashlar.dev/agent-not-ready, which new nodes may be made with, off nodes on which the driver is ready (controller)")
}

func (o *options) monitoringFlags(flags *pflag.FlagSet) {
	flags.StringVar(&o.metrics, "metrics-endpoint", "", "HOST:PORT or :PORT to serve metrics on, as http://HOST:PORT/metrics; without it, they are not served")
	flags.BoolVar(&o.perVolume, "metrics-per-volume", false, "also serve metrics with a series for each volume: its size, and the space that it takes (all and node)")
	flags.StringVar(&o.traces, "trace-endpoint", "", "HOST:PORT to send traces to, by OTLP (gRPC, without TLS); without it, there are none")
}

func (o *options) loggingFlags(flags *pflag.FlagSet) {
	klogFlags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(klogFlags)
	for _, one := range []struct{ name, usage string }{
		{"v", "level of detail: 0 logs what went wrong and what changed, 4 and more also each call"},
		{"vmodule", "levels for single source files, as `FILE=LEVEL,...`; the name may have wildcards"},
	} {
		klogFlags.Lookup(one.name).Usage = one.usage
		flags.AddGoFlag(klogFlags.Lookup(one.name))
	}
	flags.StringVar(&o.logFormat, "logging-format", "text", "text or json")
}

// complete checks the flags after they were parsed, and sets the fields that are computed from them.
func (o *options) complete(flags *pflag.FlagSet) error {
	o.verbosity, _ = strconv.Atoi(flags.Lookup("v").Value.String()) // klog has parsed it as a number
	switch {
	case !slices.Contains(modes, o.mode):
		return fmt.Errorf("--mode=%s: all, controller and node are known", o.mode)
	case !nodePattern.MatchString(o.nodeID):
		return fmt.Errorf("--node-id=%s: use 1 to 63 letters, digits, dots, dashes and underscores, with a letter or digit at either end", o.nodeID)
	case !driverNamePattern.MatchString(o.driverName):
		return fmt.Errorf("--driver-name=%s: use up to 63 letters, digits, dots and dashes", o.driverName)
	case o.maxVolumes < 0:
		return fmt.Errorf("--max-volumes=%d: give 0 or more", o.maxVolumes)
	case !slices.Contains(logFormats, o.logFormat):
		return fmt.Errorf("--logging-format=%s: text and json are known", o.logFormat)
	}
	if _, err := rpc.ParseEndpoint(o.endpoint); err != nil {
		return err
	}
	if err := cmp.Or(o.checkMonitoring(), o.checkCluster(), o.checkPort(), o.checkRemote(), o.checkPage()); err != nil {
		return err
	}
	if o.mode != "controller" {
		if err := o.pools.setDefault(); err != nil {
			return err
		}
	}
	return o.setEphemeral(flags.Changed("ephemeral-pools"))
}

// setEphemeral reads the flags of inline ephemeral volumes; given says whether --ephemeral-pools was. Without it, with --mode=all, such volumes may be in any
// pool: who has the socket may make any volume there. With --mode=node they may be in none.
func (o *options) setEphemeral(given bool) (err error) {
	if o.ephemeral.MaxSize, err = csimap.ParseQuantity(o.ephemeralSize); err != nil {
		return fmt.Errorf("--ephemeral-max-size: %w", err)
	}
	var known []string
	for _, pool := range o.pools {
		known = append(known, pool.name)
	}
	switch {
	case !given && o.mode == "all":
		o.ephemeral.Pools = known
	case o.ephemeralPools == "":
	case o.mode == "controller":
		return errors.New("--ephemeral-pools: pools belong to nodes")
	default:
		o.ephemeral.Pools = strings.Split(o.ephemeralPools, ",")
	}
	for _, name := range o.ephemeral.Pools {
		if !slices.Contains(known, name) {
			return fmt.Errorf("--ephemeral-pools=%s: there is no --pool %q", o.ephemeralPools, name)
		}
	}
	return nil
}

func (o *options) node() node.Options {
	return node.Options{MaxVolumes: o.maxVolumes, Claims: o.claims, Ephemeral: o.ephemeral}
}

func serve(ctx context.Context, o options) error {
	if o.logFormat == "json" {
		// klog's -v 4 is slog's level -4.
		klog.SetSlogLogger(slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.Level(-o.verbosity)})))
	}
	defer klog.Flush()
	if o.traces != "" {
		stop, err := trace.Export(ctx, o.traces, "ashlar-"+o.mode, version, o.nodeID)
		if err != nil {
			return err
		}
		defer stop()
	}
	switch o.mode {
	case "controller":
		return startController(ctx, o)
	case "node":
		return startNode(ctx, o)
	}
	return startAlone(ctx, o)
}

// startAlone serves all services over the pools of this machine.
func startAlone(ctx context.Context, o options) (err error) {
	watching := disks.New(ctx)
	store, mounts, pools, err := openLocal(ctx, o, nil, watching)
	defer func() { err = errors.Join(err, closeAll(pools)) }()
	if err != nil {
		return err
	}
	listener, err := rpc.Listen(o.endpoint)
	if err != nil {
		return err
	}
	// answer closes it, too.
	defer listener.Close()
	store.DropOldLeftovers(ctx) // the socket is ours, so no other driver works on the pools
	measuring := measure.New(ctx, store, o.measured(pools), o.perVolume)
	defer measuring.Close() // closed before the pools
	watching.Start()
	defer watching.Close()
	c := controller.New(store)
	return o.monitored(ctx, []metrics.Source{measuring.Samples, watching.Samples(o.nodeID)}, func(ctx context.Context, observe observer) error {
		shown := &polled{overview: o.overview(store, usesNothing), busy: func() bool { return len(store.Progress().Running()) > 0 }}
		return o.withPage(ctx, shown, func(ctx context.Context) error {
			return answer(ctx, o, listener, rpc.Services{Identity: identity.New(o.driverName, version, nil), Observe: shown.observing(observe),
				Controller: c, GroupController: c, SnapshotMetadata: c, Node: node.New(ctx, store, mounts, o.node()), Overview: o.overview(store, usesNothing)})
		})
	})
}

// overview returns what driver status and similar commands show of this machine.
func (o *options) overview(local *volume.Local, uses func(context.Context) []overview.Use) socket.Source {
	kinds := map[string]string{}
	for _, pool := range o.pools {
		kinds[pool.name] = pools.KindOf(pool.location)
	}
	return func(ctx context.Context) (*overview.Overview, error) {
		out, err := local.Overview(ctx, kinds)
		if err == nil {
			out.Driver, out.Version, out.Uses = o.driverName, version, uses(ctx)
		}
		return out, err
	}
}

// openLocal opens the pools of this machine. known returns what was recorded of the pool with a name; nil if nothing was, or for all pools if known is nil. The
// caller closes the pools that it returns, with an error too.
func openLocal(ctx context.Context, o options, known func(pool string) blockdev.Known, watching *disks.Monitor) (*volume.Local, *mount.Table, []blockdev.Pool, error) {
	log := klog.FromContext(ctx)
	mounts, err := mount.LoadTable()
	if err != nil {
		return nil, nil, nil, err
	}
	// All at once: a pool whose disk hangs must not delay the others.
	found, failures := make([]blockdev.Pool, len(o.pools)), make([]error, len(o.pools))
	var opening sync.WaitGroup
	for i, one := range o.pools {
		var remembered blockdev.Known
		if known != nil {
			remembered = known(one.name)
		}
		opening.Go(func() {
			pool, err := pools.OpenLazy(ctx, one.name, one.url, remembered)
			if failures[i] = err; err == nil {
				found[i] = watching.Watch(pool)
			}
		})
	}
	opening.Wait()
	opened := slices.DeleteFunc(found, func(p blockdev.Pool) bool { return p == nil })
	if err := errors.Join(failures...); err != nil {
		return nil, nil, opened, err
	}
	limit := o.maxVolumes
	if o.mode == "node" {
		limit = 0 // claims are objects of the cluster, whose controller counts them
	}
	store, err := volume.NewLocal(ctx, o.nodeID, opened, mounts, limit)
	for _, pool := range opened {
		go func() { // not waited for: the disk may hang
			if blockdev.Unwrap(pool) == nil {
				return // OpenLazy has logged that
			}
			problems := pool.PoolHealth(ctx)
			if blockdev.Unwrap(pool) == nil {
				return // it was closed meanwhile, and the problems say that alone
			}
			for _, problem := range problems {
				log.Info("Pool has a problem", "pool", pool.Name(), "reason", problem.Reason, "message", problem.Message)
			}
		}()
	}
	return store, mounts, opened, err
}

func closeAll(pools []blockdev.Pool) error {
	var failures []error
	for _, pool := range pools {
		failures = append(failures, pool.Close())
	}
	return errors.Join(failures...)
}

// answer serves calls until ctx ends, and closes the listener.
func answer(ctx context.Context, o options, listener net.Listener, services rpc.Services) error {
	log := klog.FromContext(ctx)
	log.Info("Serving", "driver", o.driverName, "version", version, "node", o.nodeID, "mode", o.mode, "endpoint", o.endpoint, "pools", o.pools.String())
	debug.FreeOSMemory()                   // the garbage of reading all mounts and records, as large as what is kept of them
	if err := unmapProgram(); err != nil { // serving works without it
		log.Error(err, "Could not give back the memory that only the start needed")
	}
	services.Traced = o.traces != ""
	err := rpc.Serve(ctx, listener, services)
	log.Info("Stopped")
	return err
}
