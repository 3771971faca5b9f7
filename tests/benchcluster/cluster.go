package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

const (
	driverName = "block.csi.ashlar.dev"
	namespace  = "ashlar-bench"
	immediate  = "ashlar-bench-immediate"
	// aftermath is for what comes after the last answer: events, statuses, capacities.
	aftermath = 10 * time.Second
)

// inCluster is a cluster with the driver in it.
type inCluster struct {
	kube  kubernetes.Interface
	audit *auditLog // nil without one
	image string
	draws figures.Draws

	mu     sync.Mutex
	seen   map[string]time.Time // KIND/NAME of what got to where it was to get
	claims map[string]string    // by their PersistentVolumes
	news   chan struct{}
}

func measureCluster(ctx context.Context, args []string) (err error) {
	flags := flag.NewFlagSet("cluster", flag.ExitOnError)
	kubeconfig := flags.String("kubeconfig", "", "how to reach the cluster")
	claims := flags.Int("claims", 1000, "how many claims to make in one go")
	pods := flags.Int("pods", 50, "how many pods to start in one go")
	audit := flags.String("audit", "", "the API server's audit log; without it no requests are counted")
	image := flags.String("image", "", "of pods that do nothing")
	figuresDir := flags.String("figures", "", "directory for pictures of the tables (default: none)")
	_ = flags.Parse(args) // it exits
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	config.QPS, config.UserAgent = -1, "bench"
	c := &inCluster{image: *image, draws: figures.Draws{Dir: *figuresDir}, seen: map[string]time.Time{}, claims: map[string]string{}, news: make(chan struct{}, 1)}
	if c.kube, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	if *audit != "" {
		c.audit = &auditLog{path: *audit}
	}
	if err := c.watch(ctx); err != nil {
		return err
	}
	defer c.clean(ctx)
	if err := c.prepare(ctx); err != nil {
		return err
	}
	if err := c.measureClaims(ctx, *claims); err != nil {
		return err
	}
	return c.measurePods(ctx, *pods)
}

func (c *inCluster) prepare(ctx context.Context) error {
	if _, err := c.kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	class := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: immediate}, Provisioner: driverName,
		VolumeBindingMode: new(storagev1.VolumeBindingImmediate)}
	_, err := c.kube.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{})
	return err
}

// clean removes what prepare made, and what is in it.
func (c *inCluster) clean(ctx context.Context) {
	background := metav1.DeletePropagationBackground
	ctx = context.WithoutCancel(ctx)
	_ = c.kube.StorageV1().StorageClasses().Delete(ctx, immediate, metav1.DeleteOptions{})
	_ = c.kube.CoreV1().Namespaces().Delete(ctx, namespace, metav1.DeleteOptions{PropagationPolicy: &background})
}

// watch notes when claims are bound, volumes attached and pods run, and when they are gone. What is of a pod's volume has the pod's name, as
// its claim has.
func (c *inCluster) watch(ctx context.Context) error {
	factory := informers.NewSharedInformerFactory(c.kube, 0)
	note := func(key string) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if _, there := c.seen[key]; !there {
			c.seen[key] = time.Now()
		}
		select {
		case c.news <- struct{}{}:
		default: // there is
		}
	}
	look := func(v any, gone bool) {
		if last, ok := v.(cache.DeletedFinalStateUnknown); ok {
			v = last.Obj
		}
		switch o := v.(type) {
		case *corev1.PersistentVolumeClaim:
			if o.Annotations["volume.kubernetes.io/storage-provisioner"] != "" {
				note("asked/" + o.Name)
			}
			if o.Status.Phase == corev1.ClaimBound {
				note("bound/" + o.Name)
			}
		case *corev1.PersistentVolume:
			if o.Spec.ClaimRef == nil {
				return
			}
			c.mu.Lock()
			c.claims[o.Name] = o.Spec.ClaimRef.Name
			c.mu.Unlock()
			if note("made/" + o.Spec.ClaimRef.Name); gone {
				note("gone/" + o.Spec.ClaimRef.Name)
			}
		case *storagev1.VolumeAttachment:
			c.mu.Lock()
			claim := c.claims[ptr.Deref(o.Spec.Source.PersistentVolumeName, "")]
			c.mu.Unlock()
			if note("wanted/" + claim); o.Status.Attached {
				note("attached/" + claim)
			}
		case *corev1.Pod:
			if o.Spec.NodeName != "" {
				note("scheduled/" + o.Name)
			}
			if o.Status.Phase == corev1.PodRunning {
				note("runs/" + o.Name)
			}
			if gone {
				note("ended/" + o.Name)
			}
		}
	}
	core := factory.Core().V1()
	for _, informer := range []cache.SharedIndexInformer{core.PersistentVolumeClaims().Informer(), core.PersistentVolumes().Informer(), core.Pods().Informer(),
		factory.Storage().V1().VolumeAttachments().Informer()} {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(o any) { look(o, false) }, UpdateFunc: func(_, o any) { look(o, false) }, DeleteFunc: func(o any) { look(o, true) },
		}); err != nil {
			return err
		}
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return ctx.Err()
}

// until waits until all things were seen to have got somewhere, and returns when each was.
func (c *inCluster) until(ctx context.Context, where string, names []string) ([]time.Time, error) {
	late := time.After(15 * time.Minute)
	for {
		c.mu.Lock()
		var when []time.Time
		for _, name := range names {
			if at, there := c.seen[where+"/"+name]; there {
				when = append(when, at)
			}
		}
		c.mu.Unlock()
		if len(when) == len(names) {
			return when, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-late:
			return nil, fmt.Errorf("%d of %d are %s after 15 minutes", len(when), len(names), where)
		case <-c.news:
		}
	}
}

// requests are those since the last call, the bench's own left out; nil without a log.
func (c *inCluster) requests() (map[request]int, error) {
	if c.audit == nil {
		return nil, nil
	}
	counts, err := c.audit.take()
	maps.DeleteFunc(counts, func(r request, _ int) bool { return r.who == "bench" || r.watch() })
	return counts, err
}

// step does something to n things, waits until all got somewhere, and returns what it cost
// in requests, and a row of how long it took.
func (c *inCluster) step(ctx context.Context, n int, where string, act func(ctx context.Context, name string) error, name func(int) string) (counts map[request]int, row []string, err error) {
	if _, err := c.requests(); err != nil {
		return nil, nil, err
	}
	names := []string{}
	for i := range n {
		names = append(names, name(i))
	}
	began := time.Now()
	starts := make(map[string]time.Time, n)
	if err := each(ctx, n, 32, func(ctx context.Context, i int) error {
		c.mu.Lock()
		starts[names[i]] = time.Now()
		if _, there := c.seen["start/"+names[i]]; !there { // its deletion is another step
			c.seen["start/"+names[i]] = starts[names[i]]
		}
		c.mu.Unlock()
		return act(ctx, names[i])
	}); err != nil {
		return nil, nil, err
	}
	asked := time.Since(began)
	when, err := c.until(ctx, where, names)
	if err != nil {
		return nil, nil, err
	}
	var took []time.Duration
	last := began
	for i, at := range when {
		took = append(took, at.Sub(starts[names[i]]))
		if at.After(last) {
			last = at
		}
	}
	time.Sleep(aftermath)
	counts, err = c.requests()
	return counts, []string{seconds(asked), seconds(last.Sub(began)), fmt.Sprintf("%.1f", float64(n)/last.Sub(began).Seconds()),
		seconds(figures.Quantile(took, 0.5)), seconds(figures.Quantile(took, 0.99))}, err
}

var stepColumns = []string{"asked for in, s", "all in, s", "per second", "median, s", "p99, s"}

func (c *inCluster) makeClaim(ctx context.Context, name, class string) error {
	_, err := c.kube.CoreV1().PersistentVolumeClaims(namespace).Create(ctx, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("8Mi")}}}}, metav1.CreateOptions{})
	return err
}

func (c *inCluster) deleteClaim(ctx context.Context, name string) error {
	err := c.kube.CoreV1().PersistentVolumeClaims(namespace).Delete(ctx, name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (c *inCluster) measureClaims(ctx context.Context, n int) error {
	fmt.Printf("\n### Claims\n\n%d claims of 8 MiB for ext4 in one go, of a class that binds at once; then all deleted. As seen by a watch.\n", n)
	name := numbered("claim")
	made, bound, err := c.step(ctx, n, "bound", func(ctx context.Context, name string) error { return c.makeClaim(ctx, name, immediate) }, name)
	if err != nil {
		return err
	}
	rss := residents()
	waits, chart := c.waits(n, name, claimWaits)
	chart.Name, chart.Title = "cluster-claims", fmt.Sprintf("From claim to Bound, %d claims in one go", n)
	deleted, gone, err := c.step(ctx, n, "gone", c.deleteClaim, name)
	if err != nil {
		return err
	}
	figures.Table(append([]string{""}, stepColumns...), [][]string{append([]string{"claim to Bound"}, bound...), append([]string{"deletion to PersistentVolume gone"}, gone...)})
	fmt.Println("\nWhere the time from claim to Bound goes:")
	figures.Table([]string{"", "median, s", "p99, s"}, waits)
	if err := c.draws.Draw(chart); err != nil {
		return err
	}
	if c.audit != nil {
		fmt.Printf("\nRequests per volume, all that the API server served meanwhile (and in the %s after), watches apart.\n", aftermath)
		fmt.Println("\nFrom claim to Bound:")
		printRequests(made, float64(n), "per volume")
		fmt.Println("\nFrom deletion to gone:")
		printRequests(deleted, float64(n), "per volume")
	}
	if len(rss) > 0 {
		fmt.Printf("\nResident memory with %d volumes, all replicas:\n", n)
		figures.Table([]string{"process", "MiB"}, rss)
	}
	return nil
}

// leg is a part of the way to where something was to get.
type leg struct{ what, from, to string }

var (
	claimWaits = []leg{{"Kubernetes asks the driver for it", "start", "asked"},
		{"provisioner, controller and node make it", "asked", "made"}, {"Kubernetes binds it", "made", "bound"}}
	podWaits = []leg{{"Kubernetes chooses a node, and asks the driver for the volume", "start", "asked"},
		{"provisioner, controller and node make it", "asked", "made"}, {"Kubernetes binds it", "made", "bound"},
		{"Kubernetes gives the pod to the node", "bound", "scheduled"}, {"Kubernetes asks for its attachment", "scheduled", "wanted"},
		{"attacher and controller attach it", "wanted", "attached"}, {"the kubelet notices, has the driver stage and publish it, and starts the pod", "attached", "runs"}}
)

// waits is where the time of n things went.
func (c *inCluster) waits(n int, name func(int) string, legs []leg) ([][]string, figures.Chart) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var rows [][]string
	chart := figures.Chart{Unit: "ms: median, and p10 to p90", Series: []figures.Series{{Name: "each"}}}
	for _, w := range legs {
		var took []time.Duration
		for i := range n {
			took = append(took, c.seen[w.to+"/"+name(i)].Sub(c.seen[w.from+"/"+name(i)]))
		}
		rows = append(rows, []string{w.what, seconds(figures.Quantile(took, 0.5)), seconds(figures.Quantile(took, 0.99))})
		chart.Add(w.what, figures.Milliseconds(took))
	}
	return rows, chart
}

func (c *inCluster) makePod(ctx context.Context, name string, source corev1.VolumeSource) error {
	grace := int64(0)
	_, err := c.kube.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		TerminationGracePeriodSeconds: &grace,
		Containers:                    []corev1.Container{{Name: "pause", Image: c.image, VolumeMounts: []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}}},
		Volumes:                       []corev1.Volume{{Name: "data", VolumeSource: source}}}}, metav1.CreateOptions{})
	return err
}

func (c *inCluster) deletePod(ctx context.Context, name string) error {
	return c.kube.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{})
}

func (c *inCluster) measurePods(ctx context.Context, n int) error {
	fmt.Printf("\n### Pods\n\n%d pods in one go, each with a new claim of the class `ashlar`: made, claimed, attached, formatted, mounted. The floor\nis the same pods with an emptyDir.\n", n)
	var rows [][]string
	var floor, counts map[request]int
	var calls callTimes
	for _, round := range []string{"", "2"} {
		var more [][]string
		var err error
		if floor, more, err = c.podsOnFloor(ctx, n, "floor"+round); err != nil {
			return err
		}
		rows = append(rows, more...)
		var gone []string
		before, err := c.kubeletCalls(ctx)
		if err != nil {
			return err
		}
		if counts, more, gone, err = c.podsWithClaims(ctx, n, "pod"+round); err != nil {
			return err
		}
		if calls, err = c.kubeletCalls(ctx); err != nil {
			return err
		}
		calls.less(before)
		if round != "" {
			rows = append(rows, append([]string{"its claims, deletion to gone"}, gone...))
		}
		rows = append(rows, more...)
	}
	figures.Table(append([]string{""}, stepColumns...), rows)
	fmt.Println("\nWhere the time of a pod with a new claim goes, the second time:")
	waits, chart := c.waits(n, numbered("pod2"), podWaits)
	chart.Name, chart.Title = "cluster-pods", fmt.Sprintf("From claim and pod to Running, %d in one go", n)
	figures.Table([]string{"", "median, s", "p99, s"}, waits)
	if err := c.draws.Draw(chart); err != nil {
		return err
	}
	fmt.Println("\nOf that, what the kubelet waits for the node's driver, by its own figures:")
	figures.Table([]string{"call", "of them", "mean, s"}, calls.rows())
	if c.audit != nil {
		more := maps.Clone(counts)
		for r, n := range floor {
			more[r] -= n
		}
		fmt.Println("\nRequests per pod to Running, beyond those of a pod with an emptyDir:")
		printRequests(more, float64(n), "per pod")
	}
	return nil
}

// podsOnFloor starts and deletes pods with an emptyDir, and returns what requests they took to run, and the rows.
func (c *inCluster) podsOnFloor(ctx context.Context, n int, kind string) (map[request]int, [][]string, error) {
	return c.pods(ctx, n, "an emptyDir", kind, func(context.Context, string) (corev1.VolumeSource, error) {
		return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}, nil
	})
}

// podsWithClaims is podsOnFloor for pods with a new claim each; gone is the row of the deletion of those.
func (c *inCluster) podsWithClaims(ctx context.Context, n int, kind string) (counts map[request]int, rows [][]string, gone []string, err error) {
	counts, rows, err = c.pods(ctx, n, "a new claim", kind, func(ctx context.Context, name string) (corev1.VolumeSource, error) {
		return corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: name}}, c.makeClaim(ctx, name, "ashlar")
	})
	if err == nil {
		_, gone, err = c.step(ctx, n, "gone", c.deleteClaim, numbered(kind))
	}
	return counts, rows, gone, err
}

// pods starts pods and deletes them. source makes what a pod mounts.
func (c *inCluster) pods(ctx context.Context, n int, what, kind string, source func(ctx context.Context, name string) (corev1.VolumeSource, error)) (map[request]int, [][]string, error) {
	counts, took, err := c.step(ctx, n, "runs", func(ctx context.Context, name string) error {
		volume, err := source(ctx, name)
		if err != nil {
			return err
		}
		return c.makePod(ctx, name, volume)
	}, numbered(kind))
	if err != nil {
		return nil, nil, err
	}
	_, gone, err := c.step(ctx, n, "ended", c.deletePod, numbered(kind))
	return counts, [][]string{append([]string{"pods with " + what + ", to Running"}, took...), append([]string{"... deletion to gone"}, gone...)}, err
}

// numbered returns the names of things of a kind.
func numbered(kind string) func(int) string {
	return func(i int) string { return fmt.Sprintf("%s-%d", kind, i) }
}
