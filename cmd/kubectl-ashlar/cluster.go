package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/internal/cli"
	"github.com/ashlar-csi/ashlar/internal/overview"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/lost"
	"github.com/ashlar-csi/ashlar/pkg/cluster/view"
)

// cluster is a connection to the cluster that kubectl's flags select.
type cluster struct {
	client.Client
	config *rest.Config
	kube   kubernetes.Interface
	clock  *clock
	back   time.Time // when the API server last answered again after it had been silent
}

// patience is how long a request is repeated while the API server does not answer; tests wait less.
var patience = 2 * time.Minute

// standstill is how long a move may show no change before it is not waited for any more; tests wait less.
var standstill = 2 * time.Minute

// lookAgain is the time between two looks, and between two tries of a request; tests wait less.
var lookAgain = time.Second

// errSilent is the error of a request that the API server has not answered: it may have been done, or not.
var errSilent = errors.New("the API server has not answered")

// patiently repeats a request while the API server does not answer (unanswered), for patience; errSilent after that. The request may have been done each time.
func (c *cluster) patiently(ctx context.Context, request func() error) error {
	begun, away := time.Now(), false
	for {
		err := request()
		switch {
		case !unanswered(err):
			if away {
				c.back = time.Now()
			}
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(begun) > patience:
			return fmt.Errorf("%w for %s: %w", errSilent, patience, err)
		}
		away = true
		select {
		case <-ctx.Done():
		case <-time.After(lookAgain):
		}
	}
}

// unanswered reports whether the error of a request is no answer to it: nothing came back, or a server error or "too many requests", of the API server or of a
// proxy before it.
func unanswered(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return err != nil
	}
	code := status.Status().Code
	return code >= http.StatusInternalServerError || code == http.StatusTooManyRequests
}

// page is how many objects are listed with one request, as kubectl does.
const page = 500

// requestTime is the default of --request-timeout, how long a request may take: an API server works on one no longer.
const requestTime = "1m0s"

// connect prepares a connection. It makes no request: those of the commands can be interrupted.
func connect(flags *genericclioptions.ConfigFlags) (*cluster, error) {
	config, err := flags.ToRESTConfig()
	if err != nil {
		return nil, err
	}
	c := &cluster{config: config, clock: &clock{}}
	config.UserAgent = "kubectl-ashlar/" + version
	config.QPS, config.Burst = 50, 100 // a command makes a handful of lists
	config.Wrap(c.clock.wrap)
	known, err := view.Scheme()
	if err != nil {
		return nil, err
	}
	if c.Client, err = client.New(config, client.Options{Scheme: known, Mapper: mapper()}); err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	c.kube, err = kubernetes.NewForConfig(config)
	return c, err
}

// mapper knows the resources of all kinds that are used here. Otherwise the client would ask the API server for them, with a request that cannot be
// interrupted.
func mapper() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	v1alpha1.AddToMapper(m)
	lost.AddToMapper(m)
	m.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	m.Add(corev1.SchemeGroupVersion.WithKind("PersistentVolume"), meta.RESTScopeRoot)
	m.Add(storagev1.SchemeGroupVersion.WithKind("StorageClass"), meta.RESTScopeRoot)
	m.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	for _, kind := range []string{"Event", "PersistentVolumeClaim", "Pod"} {
		m.Add(corev1.SchemeGroupVersion.WithKind(kind), meta.RESTScopeNamespace)
	}
	return m
}

// Overview lists all objects once, and makes the overview of them.
func (c *cluster) Overview(ctx context.Context) (*overview.Overview, error) {
	if _, err := c.kube.Discovery().ServerVersionWithContext(ctx); err != nil { // the answer has the API server's time, too
		return nil, fmt.Errorf("ask the API server at %s: %w", c.config.Host, err)
	}
	return view.Take(ctx, c, view.Options{Version: version, Page: page, Now: c.clock.now(), Kubernetes: true})
}

// clock is the clock of the API server, from the dates of its answers. Leases are judged by it, as that of this machine may be wrong.
type clock struct {
	mu     sync.Mutex
	server time.Time
	at     time.Time // when that answer came, by the clock of this machine
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server.IsZero() {
		return time.Now()
	}
	return c.server.Add(time.Since(c.at))
}

func (c *clock) wrap(next http.RoundTripper) http.RoundTripper { return &ticking{next, c} }

type ticking struct {
	http.RoundTripper
	clock *clock
}

// WrappedRoundTripper gives client-go the transport below (net.RoundTripperWrapper of apimachinery).
func (t *ticking) WrappedRoundTripper() http.RoundTripper { return t.RoundTripper }

func (t *ticking) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := t.RoundTripper.RoundTrip(r)
	if err == nil {
		if date, err := http.ParseTime(answer.Header.Get("Date")); err == nil {
			t.clock.mu.Lock()
			t.clock.server, t.clock.at = date, time.Now()
			t.clock.mu.Unlock()
		}
	}
	return answer, err
}

// Details returns the events of a volume: of its objects, its PersistentVolume, its claim and its pods. It also adds to the volume its devices and mounts,
// which its node knows. What cannot be found out is listed in missing; err is not nil only if the context has ended.
func (c *cluster) Details(ctx context.Context, v *overview.Volume) (history []cli.Event, missing []string, err error) {
	subjects := []subject{{"Volume", metav1Default, keyOf(v.ID)}}
	if v.Replicas != nil {
		subjects = []subject{{"ReplicatedVolume", metav1Default, keyOf(v.ID)}}
		for _, leg := range v.Replicas.Legs {
			subjects = append(subjects, subject{"Volume", metav1Default, keyOf(leg.ID)})
		}
	}
	if v.PersistentVolume != "" {
		subjects = append(subjects, subject{"PersistentVolume", metav1Default, v.PersistentVolume})
	}
	if v.Claim != nil {
		subjects = append(subjects, subject{"PersistentVolumeClaim", v.Claim.Namespace, v.Claim.Name})
	}
	for _, pod := range v.Pods {
		subjects = append(subjects, subject{"Pod", pod.Namespace, pod.Name})
	}
	reading, cancel := context.WithTimeout(ctx, eventsTime)
	defer cancel()
	for _, s := range subjects {
		events, err := c.events(reading, s)
		if ctx.Err() != nil {
			return nil, missing, ctx.Err()
		}
		why := fmt.Sprintf("they could not be read (%v)", err)
		if apierrors.IsForbidden(err) {
			why = "you may not list them"
		}
		if err != nil {
			missing = append(missing, fmt.Sprintf("events of namespace %s: %s, so it is not known what happened to %s %s", s.namespace, why, s.kind, s.name))
		}
		history = append(history, events...)
	}
	slices.SortStableFunc(history, func(a, b cli.Event) int { return a.Time.Compare(b.Time) })
	if err := c.fromNode(ctx, v); err != nil {
		missing = append(missing, fmt.Sprintf("its devices and mounts: %v", err))
	}
	return history, missing, nil
}

// keyOf returns the last part of an ID, which is the name of the object.
func keyOf(id string) string { return id[strings.LastIndexByte(id, '.')+1:] }

// eventsTime is how long Details waits for events, which an API server may keep in an etcd of their own.
const eventsTime = 30 * time.Second

// metav1Default is the namespace of events of objects that have no namespace.
const metav1Default = "default"

// subject is an object that events are about.
type subject struct{ kind, namespace, name string }

func (c *cluster) events(ctx context.Context, s subject) ([]cli.Event, error) {
	var list corev1.EventList
	if err := c.List(ctx, &list, client.InNamespace(s.namespace), client.MatchingFieldsSelector{Selector: fields.Set{"involvedObject.kind": s.kind, "involvedObject.name": s.name}.AsSelector()}); err != nil {
		return nil, err
	}
	of := s.kind + " " + s.name
	if s.namespace != metav1Default || s.kind == "Pod" || s.kind == "PersistentVolumeClaim" {
		of = s.kind + " " + s.namespace + "/" + s.name
	}
	var events []cli.Event
	for i := range list.Items {
		e := &list.Items[i]
		one := cli.Event{Time: latest(e), Type: e.Type, Reason: e.Reason, Message: e.Message, Of: of, Count: int(e.Count)}
		if e.Series != nil {
			one.Count = int(e.Series.Count)
		}
		events = append(events, one)
	}
	return events, nil
}

// latest returns when an event was seen last. Which field has that depends on who wrote the event.
func latest(e *corev1.Event) time.Time {
	if e.Series != nil {
		return e.Series.LastObservedTime.UTC()
	}
	for _, t := range []time.Time{e.LastTimestamp.Time, e.EventTime.Time} {
		if !t.IsZero() {
			return t.UTC()
		}
	}
	return e.CreationTimestamp.UTC()
}

// nodeTime is how long Details waits for the driver on a node, which may itself wait for a disk that hangs.
const nodeTime = 30 * time.Second

// fromNode adds to a volume what only its node knows, and asks the driver there. For a volume with replicas it asks the node that the volume is published to,
// if any.
func (c *cluster) fromNode(ctx context.Context, v *overview.Volume) error {
	node := v.Node
	if v.Replicas != nil {
		if node = v.Published; node == "" {
			return nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, nodeTime)
	defer cancel()
	agent, err := c.agent(ctx, node)
	if err != nil {
		return err
	}
	var said, complaint bounded
	var exit exec.CodeExitError
	if err := c.run(ctx, agent, &said, &complaint, "/driver", "describe", v.ID, "-o", "json"); ctx.Err() != nil {
		return fmt.Errorf("ask the driver on node %s: %w", node, ctx.Err())
	} else if v.Replicas != nil && errors.As(err, &exit) && exit.Code == cli.StatusNoVolume { // the volume is published, but not used there yet
		return nil
	} else if err != nil {
		return fmt.Errorf("ask the driver on node %s: %w", node, cmp.Or(complained(&complaint.Buffer), err))
	}
	var there struct{ Volume overview.Volume }
	if err := json.Unmarshal(said.Bytes(), &there); err != nil {
		return fmt.Errorf("what the driver on node %s says cannot be read: %w", node, err)
	}
	v.Devices, v.Mounts = there.Volume.Devices, there.Volume.Mounts
	if v.Used == nil && v.Replicas == nil {
		v.Used = there.Volume.Used
	}
	return nil
}

// bounded keeps what is written, up to mostSaid bytes; then Write fails. A driver prints less about one volume.
type bounded struct{ bytes.Buffer }

const mostSaid = 4 << 20 // bytes

func (b *bounded) Write(p []byte) (int, error) {
	if b.Len()+len(p) > mostSaid {
		return 0, fmt.Errorf("it says more than %d bytes", mostSaid)
	}
	return b.Buffer.Write(p)
}

// complained returns what a program has printed on its standard error as an error; nil if that is empty.
func complained(said *bytes.Buffer) error {
	if text := strings.TrimSpace(said.String()); text != "" {
		return fmt.Errorf("%s", text)
	}
	return nil
}

// agent returns the running pod of the agent on a node.
func (c *cluster) agent(ctx context.Context, node string) (*corev1.Pod, error) {
	agents, err := c.agents(ctx, client.MatchingFields{"spec.nodeName": node})
	if err != nil {
		return nil, err
	}
	if len(agents) == 0 {
		return nil, fmt.Errorf("no pod of the driver runs on node %s", node)
	}
	return &agents[0], nil
}

// agents returns the running pods of agents.
func (c *cluster) agents(ctx context.Context, which ...client.ListOption) ([]corev1.Pod, error) {
	var pods corev1.PodList
	which = append(which, client.MatchingLabels(view.AgentLabels))
	if err := c.List(ctx, &pods, which...); err != nil {
		return nil, fmt.Errorf("list the pods of the driver: %w", err)
	}
	return slices.DeleteFunc(pods.Items, func(p corev1.Pod) bool {
		return p.Status.Phase != corev1.PodRunning || p.DeletionTimestamp != nil || !view.IsAgent(&p)
	}), nil
}

// run runs a program in the driver's container of a pod. If it returns because the context has ended, the program may still write to stdout and stderr, so they
// must not be read.
func (c *cluster) run(ctx context.Context, pod *corev1.Pod, stdout, stderr io.Writer, program ...string) error {
	request := c.kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		Timeout(0). // the program may run for any time
		VersionedParams(&corev1.PodExecOptions{Container: view.AgentContainer, Command: program, Stdout: true, Stderr: true}, scheme.ParameterCodec)
	overSocket, err := remotecommand.NewWebSocketExecutor(c.config, http.MethodGet, request.URL().String())
	if err != nil {
		return err
	}
	overSPDY, err := remotecommand.NewSPDYExecutor(c.config, http.MethodPost, request.URL())
	if err != nil {
		return err
	}
	either, err := remotecommand.NewFallbackExecutor(overSocket, overSPDY, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		done <- either.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: stdout, Stderr: stderr})
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done(): // StreamWithContext does not heed it while it connects
		return ctx.Err()
	}
}
