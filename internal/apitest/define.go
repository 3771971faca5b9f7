package apitest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"
)

var definitions = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// define creates the custom resources and waits until they are served.
func (s *Server) define(ctx context.Context) error {
	client, err := dynamic.NewForConfig(s.Config(Admin))
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(root(), "deploy/kubernetes/crds/*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no definitions in deploy/kubernetes/crds: %w", err)
	}
	crds := client.Resource(definitions)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		crd := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(text, &crd.Object); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if _, err := crds.Create(ctx, crd, metav1.CreateOptions{FieldValidation: "Strict"}); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for established := false; !established; {
			time.Sleep(20 * time.Millisecond)
			crd, err := crds.Get(ctx, crd.GetName(), metav1.GetOptions{})
			if err != nil {
				return err
			}
			group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
			plural, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "plural")
			// Established is said before it is served everywhere.
			_, err = client.Resource(schema.GroupVersionResource{Group: group, Version: "v1alpha1", Resource: plural}).List(ctx, metav1.ListOptions{})
			if established = err == nil; err != nil && !meta.IsNoMatchError(err) && ctx.Err() != nil {
				return err
			}
		}
	}
	return nil
}
